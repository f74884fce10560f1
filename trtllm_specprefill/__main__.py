"""`python -m trtllm_specprefill`: the same as `specprefill`."""

from trtllm_specprefill.cli import main

main()
