"""By which axis of 3-D positions rotary pairs turn, and where keys stand on each."""
