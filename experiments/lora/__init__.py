"""LoRA on a pretrained encoder."""
