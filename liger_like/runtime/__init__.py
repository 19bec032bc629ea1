"""Share what all ops need: registration, launches, checks, layouts, tiles and the names of Gluon."""
