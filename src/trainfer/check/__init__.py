"""The half that explains the numbers: probe -> dump -> align -> compare -> explain -> report."""
