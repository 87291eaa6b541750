"""Quantises checkpoints: calibration, sensitivity, precision per layer and part."""
