"""From a plan and operands to a launched kernel: configuration, signature, arguments, driver."""
