"""LoRA on a pretrained encoder, compared with its head alone.

python -m experiments.lora genre
"""

from experiments.lora import genre
from experiments.study import Study, command

STUDIES = {"genre": Study(genre.run, genre.markdown, minutes=15.0)}

if __name__ == "__main__":
    command("lora", __doc__, STUDIES)
