"""`python -m maestro_lod …` is `lod …`; torchrun starts it so in several processes."""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, or that of this file: no place of modules
    from maestro_lod.cli.main import main

    main()
