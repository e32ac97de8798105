"""`python -m batchllm`: the command line without its script, as scheduled runs start it."""

from batchllm.cli.main import main

if __name__ == "__main__":
    main()
