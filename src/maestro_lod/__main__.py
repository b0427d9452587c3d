"""`python -m maestro_lod …` is `lod …`; torchrun starts it so in several processes."""

from maestro_lod.app.cli import main

if __name__ == "__main__":
    main()
