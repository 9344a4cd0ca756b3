"""What is known of the kernels for AMD without a GPU, and the self-check for a machine with one."""
