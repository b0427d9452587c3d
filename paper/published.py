"""Numbers that the paper prints, including misprints, with the values they must have had."""

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

COUNTS = {
    ("LeNet", "params"): {"Table 10": "44426", "Table 1": "0.04 M"},
    ("LeNet", "MACs"): {"Table 10": "281640", "Table 1": "2e-4 G"},
    ("LeNet", "training params"): {"Table 10": "1.49 ×"},
    ("LeNet", "training MACs"): {"Table 10": "1.14 ×"},
    ("ResNet-18", "params"): {"Table 15": "11.17 M", "Table 11": "11.2 M", "Table 1": "11.18 M"},
    ("ResNet-18 with a 7×7 stem", "params"): {"Table 1": "11.18 M"},
    ("ResNet-18", "MACs"): {"Tables 1, 11, 15": "0.56 G"},
    ("ResNet-18", "training params"): {"Table 11": "1.13 ×"},
    ("ResNet-18", "training MACs"): {"Table 11": "1.10 ×"},
    ("VGG-19", "params"): {"Table 12": "20 M", "Table 1": "20.00 M"},
    ("VGG-19", "MACs"): {"Tables 1, 12, 15": "0.40 G"},
    ("VGG-19", "training params"): {"Table 12": "1.12 ×"},
    ("VGG-19", "training MACs"): {"Table 12": "1.10 ×"},
    ("VGG-19 with two more linear layers", "params"): {"Table 15": "20.56 M"},
    ("ResNet-50", "params"): {"Tables 1, 14": "25.56 M", "Table 3": "25.26 M"},
    ("ResNet-50", "MACs"): {"Tables 1, 3, 14": "4.12 G"},
    ("ResNet-50", "MACs, batch norm and ReLU too"): {"Tables 1, 3, 14": "4.12 G"},
    ("ResNet-50", "training params"): {"Table 14": "1.24 ×"},
    ("ResNet-50", "training MACs"): {"Table 14": "1.22 ×"},
    ("Transformer, tied output", "params"): {"Table 1": "48.98 M"},
    ("Transformer, tied output", "MACs"): {"Table 1": "1.37 G"},
    ("Transformer", "params"): {"Table 13": "53.9 M", "Table 2": "53.90 M"},
    ("Transformer", "MACs"): {"Tables 2, 13": "1.370 G"},
    ("Pufferfish ResNet-18", "params"): {"Table 15": "3.336 M"},
    ("Pufferfish ResNet-18", "MACs"): {"Table 15": "0.22 G"},
    ("Pufferfish VGG-19", "params"): {"Table 15": "8.37 M"},
    ("Pufferfish VGG-19", "MACs"): {"Table 15": "0.29 G"},
    ("Pufferfish ResNet-50", "params"): {"Table 3": "15.2 M"},
    ("Pufferfish ResNet-50", "MACs"): {"Table 3": "3.6 G"},
    ("Pufferfish ResNet-50, but stem, stage 1 and classifier", "params"): {"Table 3": "9.4 M"},
    ("Pufferfish ResNet-50, but stem, stage 1 and classifier", "MACs"): {"Table 3": "2.1 G"},
    ("Pufferfish ResNet-50, all layers", "params"): {"Table 3": "9.4 M"},
    ("Pufferfish Transformer", "params"): {"Table 2": "26.70 M"},
    ("Pufferfish Transformer", "MACs"): {"Table 2": "0.996 G"},
    ("XNOR-Net ResNet-18", "params / 32"): {"Table 15": "0.349 M"},
    ("XNOR-Net VGG-19", "params / 32"): {"Table 15": "0.64 M"},
    ("Spectral init VGG-19, 2 % of dense", "params"): {"Table 15": "0.4 M"},
    ("Maestro VGG-19, λ = 32e-6, relative to Pufferfish", "params"): {"Section 5.2": "44.8 %"},
    ("Maestro Transformer, λ = 2.56, relative to Pufferfish", "params"): {"Section 5.2": "51.7 %"},
    ("Maestro Transformer, λ = 2.56, relative to Pufferfish", "MACs"): {"Section 5.2": "25 %"},
    ("Maestro ResNet-50, all layers, relative to Pufferfish", "params"): {"Section 5.2": "97.8 %"},
}
"""Counts that follow from arithmetic, by what and quantity: where they stand, and as they stand."""

TRANSFORMER = {
    "0.32": ("1.125 G", "45.1 M"),
    "0.64": ("0.957 G", "39.1 M"),
    "1.28": ("0.570 G", "25.3 M"),
    "2.56": ("0.248 G", "13.8 M"),
    "5.12": ("0.123 G", "9.3 M"),
}
"""Table 13: λ, MACs and params. The MACs of 5.12 are said to be 0.9 × those of the dense model."""

LENET_PARAMS_SHARE = {"8e-5": "0.71 ×", "16e-5": "0.41 ×", "32e-5": "0.26 ×"}
"""Table 10: params relative to the dense model, in brackets."""

MAESTRO_PARAMS = {"VGG-19, λ = 32e-6": "2.20 M", "ResNet-50, all layers": "9.2 M"}
"""Tables 12 and 3."""

DISAGREEMENTS = {
    ("LeNet", "MACs", "Table 1"): "last digit: cut off, not rounded",
    ("LeNet", "training MACs", "Table 10"): "last digit: 1.13, for a cause unknown",
    ("VGG-19", "training MACs", "Table 12"): "last digit: 1.09, for a cause unknown",
    ("ResNet-18", "params", "Table 1"): "misprint: the count of a 7×7 stem, see below",
    ("VGG-19", "params", "Table 1"): "last digit: 20, with two digits more than are known",
    ("ResNet-50", "params", "Table 3"): "misprint: 25.56",
    ("ResNet-50", "MACs", "Tables 1, 3, 14"): "convention: batch norm and ReLU counted, see below",
    ("Transformer", "params", "Table 2"): "last digit: 53.9, with a digit more than is known",
    ("Pufferfish ResNet-50, all layers", "params", "Table 3"): (
        "convention: not all layers are meant, see above"
    ),
    ("Pufferfish ResNet-50, but stem, stage 1 and classifier", "MACs", "Table 3"): (
        "not reproducible: this choice of layers has the 9.4 M but not the 2.1 G"
    ),
    ("Pufferfish Transformer", "MACs", "Table 2"): (
        "not reproducible: the model that has the 26.70 M has other MACs"
    ),
    ("LeNet, λ = 16e-5", "params, from its MACs", "Table 10"): (
        "misprint: repeats the dense row; the right number stands one row below"
    ),
    ("LeNet, λ = 32e-5", "params, from its 0.26 ×", "Table 10"): (
        "misprint: belongs one row above; what belongs here is lost"
    ),
    ("Transformer, λ = 5.12", "MACs relative to dense", "Table 13"): "misprint: 0.09",
    ("Maestro VGG-19, λ = 32e-6, relative to Pufferfish", "params", "Section 5.2"): (
        "misprint: the share of MACs, 0.13 / 0.29"
    ),
    ("Maestro Transformer, λ = 2.56, relative to Pufferfish", "MACs", "Section 5.2"): (
        "not reproducible: follows from Pufferfish's 0.996 G"
    ),
}
"""Why a number differs from the count: what, quantity and where -> kind of reason: reason."""

ABLATION = {
    "Maestro": (94.19, 1.00, 0.37),
    "without penalty": (94.04, 1.33, 1.00),
    "without shrinking": (94.12, 1.33, 0.37),
    "with a full pass": (94.05, 1.97, 0.37),
}
"""Table 4: accuracy in %, training MACs relative to Maestro, params relative to dense."""

CIFAR_EPOCHS = 300

RESNET = {
    "dense": (93.86, 1.00, 1.00, 1.00, 1.00),
    "0": (94.04, 1.00, 1.00, 1.10, 1.13),
    "4e-6": (94.22, 1.00, 0.99, 1.09, 1.10),
    "8e-6": (94.09, 0.89, 0.66, 1.00, 0.85),
    "16e-6": (94.19, 0.70, 0.37, 0.83, 0.58),
    "32e-6": (93.97, 0.45, 0.20, 0.60, 0.36),
    "64e-6": (93.86, 0.27, 0.11, 0.39, 0.22),
    "128e-6": (93.37, 0.17, 0.07, 0.25, 0.13),
    "256e-6": (92.48, 0.12, 0.05, 0.16, 0.08),
    "512e-6": (91.14, 0.08, 0.03, 0.11, 0.05),
    "1024e-6": (89.55, 0.06, 0.02, 0.07, 0.03),
}
"""Table 11: λ, accuracy in %, then relative to dense: MACs, params, training MACs and params."""

VGG = {
    "dense": (92.94, 1.00, 1.00, 1.00, 1.00),
    "0": (93.06, 1.00, 1.00, 1.10, 1.12),
    "4e-6": (93.33, 0.97, 0.94, 1.06, 1.04),
    "8e-6": (93.27, 0.76, 0.49, 0.90, 0.73),
    "16e-6": (93.13, 0.53, 0.23, 0.69, 0.46),
    "32e-6": (93.10, 0.33, 0.11, 0.47, 0.27),
    "64e-6": (92.70, 0.20, 0.06, 0.30, 0.16),
    "128e-6": (92.34, 0.13, 0.04, 0.19, 0.09),
    "256e-6": (91.12, 0.09, 0.02, 0.12, 0.05),
    "512e-6": (88.53, 0.06, 0.02, 0.08, 0.03),
}
"""Table 12, like Table 11."""

MULTI30K = {
    "dense": (9.85, 65.33, 1.00, 1.00, 1.00, 1.00),
    "0.32": (12.99, 61.30, 0.82, 0.84, 1.03, 1.14),
    "0.64": (9.37, 63.78, 0.70, 0.73, 0.95, 1.05),
    "1.28": (7.02, 66.14, 0.42, 0.47, 0.75, 0.86),
    "2.56": (6.90, 66.08, 0.18, 0.26, 0.47, 0.58),
    "5.12": (13.97, 57.70, 0.09, 0.17, 0.28, 0.39),
}
"""Table 13: λ, perplexity, accuracy in %, then relative to dense: MACs (of 5.12: 0.9 is a misprint
for 0.09), params, training MACs and params."""

COMPARED = {
    "ResNet-18, CIFAR-10": {
        "dense": (93.86, 1.00),
        "pufferfish": (94.17, 3.336 / 11.17),
        "cuttlefish": (93.47, 3.108 / 11.17),
        "imp": (92.12, 0.154 / 11.17),
        "raregems": (92.83, 0.076 / 11.17),
        "xnor": (90.06, 0.349 / 11.17),
        "lod": (93.86, 1.23 / 11.17),
    },
    "VGG-19, CIFAR-10": {
        "dense": (92.94, 1.00),
        "pufferfish": (92.69, 8.37 / 20.56),
        "cuttlefish": (93.39, 2.36 / 20.56),
        "spectral": (83.27, 0.4 / 20.56),
        "imp": (92.86, 5.04 / 20.56),
        "raregems": (86.28, 5.04 / 20.56),
        "xnor": (88.94, 0.64 / 20.56),
        "lod": (93.10, 2.20 / 20.56),
    },
}
"""Table 15 and Figure 3: accuracy in %, and params relative to the printed dense model. Binary
weights count as params / 32; of several λ, the one that the text compares with other methods."""
