"""The experiments of ``specrt gpu-check``; ``specrt.tools.gpu_check.table`` lists them."""
