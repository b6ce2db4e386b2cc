"""What every head does: scores, names, random twins, and the table of heads."""
