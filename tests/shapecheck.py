"""The type checker that enforces the package's shape annotations in the tests; an int may stand for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
