"""Tools that look at programs from outside: no module of the core imports them."""
