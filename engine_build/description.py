"""What a built target keeps of the model it was built from, so that it can be served without."""

from __future__ import annotations

from pathlib import Path

from engine_build.rotary_config import write_for_both
from trtllm_specprefill.measured import write
from trtllm_specprefill.models import copy_description, local_fingerprint
from trtllm_specprefill.target.evidence import FOLDER, evidence_for
from trtllm_specprefill.target.manifest import DESCRIPTION, Manifest


def describe(engine: Path) -> None:
    """Copy config, tokenizer and measured positions of the manifest's model beside it in `engine`.

    The fingerprint of the model's weights goes into the manifest. Raises `InputError` where the
    model's files cannot be read.
    """
    manifest = Manifest.read(engine)
    copy_description(manifest.model, engine / DESCRIPTION)
    write_for_both(engine / DESCRIPTION)
    fingerprint = local_fingerprint(manifest.model)
    manifest.model_copy(update={"fingerprint": fingerprint}).write(engine)
    if evidence := evidence_for(fingerprint):
        write(engine / FOLDER / f"{evidence.fingerprint}.json", evidence)
