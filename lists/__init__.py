"""The operator lists and the traits of operators, as data of the package."""
