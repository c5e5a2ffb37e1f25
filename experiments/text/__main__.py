"""Next characters of Shakespeare's roles, at several epsilons.

python -m experiments.text roles
"""

from experiments.study import Study, command
from experiments.text import roles

STUDIES = {"roles": Study(roles.run, roles.markdown, minutes=18.0)}

if __name__ == "__main__":
    command("text", __doc__, STUDIES)
