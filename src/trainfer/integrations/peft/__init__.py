"""PEFT: a low-rank adapter put into a model of Transformers. Imported only where a run asks for one."""
