"""Where a learned position comes from: the components that wrote what f_phi reads."""
