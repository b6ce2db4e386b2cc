"""What every view is made of: looks of schemes and spans, axes, legends, small array helpers, tables. Knows arrays and axes."""
