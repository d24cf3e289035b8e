"""``python -m multimm``: the command line."""

from multimm.cli import main

if __name__ == "__main__":
    main(prog_name="multimm")
