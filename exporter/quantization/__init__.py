"""Quantization of exported float models: change of basis, calibration, rounding and reports."""
