"""What the paper prints, quoted; misprints as they stand, with what they must have been beside."""

from __future__ import annotations

# Table 10: λ, accuracy and its deviation (%), MACs, params, relative training MACs and params.
LENET = {
    "dense": (98.99, 0.09, 281640, 44426, 1.00, 1.00),
    "0": (99.06, 0.09, 281640, 44426, 1.14, 1.49),
    "8e-5": (98.91, 0.09, 268577, 31363, 1.08, 1.14),
    "16e-5": (98.92, 0.05, 255369, 44426, 1.06, 0.80),
    "32e-5": (98.31, 0.39, 237084, 18155, 0.93, 0.53),
    "64e-5": (98.20, 0.49, 178165, 7996, 0.77, 0.33),
    "128e-5": (97.92, 0.22, 131789, 6375, 0.54, 0.21),
    "256e-5": (96.65, 0.14, 99969, 5293, 0.39, 0.14),
}
"""Table 10."""

LENET_PARAMS_MEANT = {"16e-5": 18155, "32e-5": 11550}
"""Two cells of Table 10 are misprinted. 16e-5 repeats the dense row: its MACs and its 0.41× say
18,155, which stands one row below; what belongs there is lost but for its 0.26× (11.3 to 11.8k)."""
