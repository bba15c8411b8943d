"""The generation loop: what ``generate`` of a parallel model runs instead of transformers' loop where that pays."""
