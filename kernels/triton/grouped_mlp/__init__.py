"""The experts' MLP over rows grouped by expert, in bf16, fp32 and quantised weights."""
