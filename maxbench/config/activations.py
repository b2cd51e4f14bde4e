"""Activations of the MLP: names, and which of them are gated. model/layers.py has the functions.

A gated activation has two up-projections: it is the product of a function of one and the other.
"""

GATED: dict[str, bool] = {
    "swiglu": True,
    "geglu": True,
    "relu2": False,
    # of gpt-oss: (up + 1) x gate x sigmoid(1.702 gate), gate <= 7, -7 <= up <= 7
    "swiglu_clamped": True,
}
