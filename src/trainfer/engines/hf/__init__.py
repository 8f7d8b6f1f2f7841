"""The simple reference: plain ``generate`` of Transformers."""
