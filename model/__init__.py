"""The PyTorch model: one idea per file, shapes from `flashsim.config`, layer roles from `flashsim.schedule`."""
