"""The pages of the methods: which builders, when they are worth a try and when not, and where they were measured.

What a method computes and guarantees is in its docstring, and is not said again here.
"""

from typing import NamedTuple


class Page(NamedTuple):
    """One page; it shows statements of small settings of `tests/algorithms_table.py`.

    Those are named as the builders are, unless `rows` names them and says what they are.
    """

    slug: str
    title: str
    names: tuple[str, ...]
    use: str
    avoid: str
    measured: tuple[str, ...] = ()
    rows: dict[str, str] | None = None
    note: str = ""


PAGES = (
    Page(
        "fedavg", "Local training, FedAvg and FedProx", ("local_only", "fedavg", "fedprox"),
        "As references. `local_only` is what every federated method must beat: it sends nothing and costs no "
        "epsilon. `fedavg` shows what one shared model reaches without privacy. `fedprox` is for many local steps on"
        " clients that differ, where their models drift apart.",
        "Where clients' data are to be hidden: neither clips nor adds noise unless you give it a mechanism. And "
        "compare with a local baseline that was trained to its own best round, as `compare` does.",
        ("fedavg", "methods", "text"),
    ),
    Page(
        "dp_fedavg", "DP-FedAvg", ("dp_fedavg", "dp_fedavg_fb"),
        "As the first private method to try, and the one that others should beat. `dp_fedavg_fb` costs no further "
        "epsilon: each client fits its own head for itself. With `sampling=FixedSize(m)` it is GDP-FL (Geyer et al. "
        "2017) with a constant clip bound.",
        "With few clients: the noise on the mean falls with the cohort, and with some dozens of clients training "
        "alone is hard to beat.",
        ("dp_pfeddsu", "mechanisms", "text", "lora", "feddpa", "audit"),
    ),
    Page(
        "dp_fedavg_mixed", "The map's recipe", ("dp_fedavg_mixed",),
        "As the first method to try where clients differ: a private shared model whose logits each client translates to "
        "its own classes, mixed with a model that the client trains alone. It costs the epsilon of DP-FedAvg.",
        "Where evaluation must be fast, since every client trains its own model `folds + 1` times, or where the task "
        "is no classification.",
        ("map",),
    ),
    Page(
        "fedrep", "FedRep and CENTAUR", ("fedrep", "centaur"),
        "Where clients' labels differ and their features are alike. Heads need no noise, since they never leave "
        "their clients, and fewer numbers are noised.",
        "Where heads are published, which voids the guarantee; or where heads have too few examples of their own.",
        ("dp_pfeddsu", "audit"),
    ),
    Page(
        "ppsgd", "PPSGD", ("ppsgd", "ppsgd_centaur"),
        "For a personal head on top of a shared one, at one gradient step a round; `ppsgd_centaur` has local epochs.",
        "Where rounds are expensive: `ppsgd` moves by one batch in each.",
        ("dp_pfeddsu",),
    ),
    Page(
        "one_shot", "One noisy sum: ridge and prototypes", ("dp_ridge", "dp_prototypes"),
        "For a linear classifier on public pretrained features, when one release must do the work of many rounds. "
        "Each client corrects the shared head by its own examples at no cost in privacy.",
        "Where the features must be learned from the clients. With a random extractor both methods fit a linear model "
        "of random features.",
    ),
    Page(
        "fedrod", "FedRoD", ("fedrod",),
        "Where labels differ by client: the shared model is trained as if they did not, and a personal head adds what "
        "the client's own labels tell. Compare with `prior_corrected`, which costs no training.",
        "Where inputs differ and labels do not: the balanced loss then equals the usual one.",
    ),
    Page(
        "dp_pfeddsu", "DP-pFedDSU", ("dp_pfeddsu", "dp_pfeddsu_paper"),
        "For a sparse extractor whose mask follows from what is broadcast, which keeps the saving in noised "
        "dimensions. `dp_pfeddsu_paper` is there to show what is published.",
        "`dp_pfeddsu_paper` for any release: its noise lies on private masks alone, and no finite epsilon holds.",
        ("dp_pfeddsu", "audit"),
    ),
    Page(
        "pmtl", "PMTL and MR-MTL", ("pmtl", "pmtl_ft", "mr_mtl"),
        "For a whole personal model that stays near the mean. `pmtl` hides a client; `mr_mtl` is for silos, each of "
        "many examples, that hide single examples from everybody, the server included.",
        "Without tuning its penalty weight: it decides between local training and one model. `mr_mtl` gives no "
        "epsilon for a whole silo.",
        ("dp_pfeddsu",),
    ),
    Page(
        "ditto", "Ditto", ("ditto",),
        "For a whole personal model per client beside a shared one that is trained as if nobody were personal.",
        "Where a client cannot keep, or not twice train, a whole model. Fine-tuning the head of a shared model is "
        "cheaper, and was as good in some seeds of what was measured.",
        ("methods",),
    ),
    Page(
        "apfl", "APFL", ("apfl",),
        "Where it is unclear how personal a model should be: each client learns its own mixture.",
        "Where local time counts: three gradients per batch.",
        ("methods",),
    ),
    Page(
        "ifca", "IFCA", ("ifca",),
        "Where clients come in a few kinds that their labels do not tell, such as pictures that are turned, or labels "
        "that mean something else: every kind gets a model of its own.",
        "Where clients are of one kind, or of as many kinds as clients: each model learns from fewer clients under the "
        "same noise.",
    ),
    Page(
        "pfedme", "pFedMe", ("pfedme",),
        "For personal models with a handle on their distance from the shared one.",
        "Where local time counts (K gradients per batch), or where the shared model is what is used: its personal "
        "models are what gains.",
        ("methods",),
    ),
    Page(
        "per_fedavg", "Per-FedAvg", ("per_fedavg",),
        "For a shared start from which a step or two of a client's own adapt well; clients keep nothing.",
        "For clients with many examples, which can train longer than the few steps that it prepares for.",
        ("methods",),
    ),
    Page(
        "scaffold", "SCAFFOLD", ("scaffold",),
        "For one shared model, many local steps and clients that differ strongly, in few rounds.",
        "Under noise, with care: a message is twice as long, and one clip bound and one noise cover both halves. "
        "Clients must keep a state.",
        ("methods",),
    ),
    Page(
        "server_optimizers", "FedAdam, FedYogi, FedAdagrad", ("fedadam", "fedyogi", "fedadagrad"),
        "As `server_optimizer=` of any method that sends updates, where coordinates need different rates.",
        "Under strong noise without tuning `tau`: noise enters the second moment too.",
        ("methods",),
        {},
        "The privacy of a run is that of the method: a server's step is post-processing.",
    ),
    Page(
        "dp_fedsam", "DP-FedSAM", ("dp_fedsam",),
        "As a variant of DP-FedAvg where clipping and noise hurt, at twice the local time.",
        "Before DP-FedAvg itself was tuned.",
    ),
    Page(
        "fed_smp", "Fed-SMP", ("fed_smp",),
        "For networks much larger than their noise allows: a public random mask cuts how many weights are noised in "
        "a round, and how much of an update is clipped.",
        "For small networks, where every weight counts in every round.",
    ),
    Page(
        "blur_lus", "BLUR and LUS", ("blur_lus",),
        "Where updates are far longer than the clip bound: a penalty keeps them short while they are trained.",
        "To save noise by sparsity: masks are private here, so all weights are noised.",
    ),
    Page(
        "adp_pfl", "ADP-PFL", ("adp_pfl", "adp_pfl_paper"),
        "Where noise is to differ by round, or by client with its leakage risk. The risk is released with noise, and"
        " a filter stops each client at its budget.",
        "For a first private model: budgets by risk cost epsilon of their own.",
        ("adp_pfl", "audit"),
        {
            "adp_pfl": "`adp_pfl`",
            "adp_pfl_released": "`adp_pfl`, private risks",
            "adp_pfl_paper": "`adp_pfl_paper`, private risks",
        },
    ),
    Page(
        "dp_lg", "LG-FedAvg with DP", ("dp_lg",),
        "For clients whose inputs differ and whose labels mean the same: extractors stay, the head is shared.",
        "For clients with few examples, which cannot train an extractor.",
        ("adp_pfl",),
    ),
    Page(
        "padpfl", "PADPFL and NbAFL", ("padpfl", "padpfl_paper"),
        "For public weights by client and round, such as of known data quality.",
        "Where weights would follow from private data: they are taken for public. Unequal weights need more noise on"
        " the sum.",
        ("padpfl", "audit"),
    ),
    Page(
        "pdp_fl", "PDP-FL and LDP-Fed", ("pdp_fl", "pdp_fl_paper"),
        "Where every client names its own epsilon for what it uploads.",
        "Where the server is trusted with uploads: noise on the sum alone is far less.",
        ("pdp_fl", "audit"),
    ),
    Page(
        "feddpa", "FedDPA", ("feddpa", "feddpa_paper"),
        "For personal coordinates chosen by Fisher information in place of a fixed head. `feddpa_paper` is there to "
        "show what its published noise guarantees.",
        "`feddpa_paper` for any release by its claim: the honest epsilon, which its statement has beside it, is far "
        "larger.",
        ("feddpa", "audit"),
    ),
    Page(
        "fine_tuned", "Fine-tuning before evaluation", ("fine_tuned",),
        "Around a method that shares a model, as the first personalization to try: it costs no "
        "epsilon, and clients keep nothing between rounds.",
        "Where clients have too few examples to train a whole model: name a part of it, such as the "
        "head.",
        (),
        {"fine_tuned": "`fine_tuned(prior_corrected(dp_fedavg(...)))`"},
    ),
    Page(
        "prior_corrected", "Correction by a client's own classes", ("prior_corrected",),
        "Wherever clients differ in how often they have each class: their own counts cost no epsilon, "
        "and a method that is compared without them may only show that its clients learn these. With "
        "fine-tuning, inside: `fine_tuned(prior_corrected(method))` trains with the correction. Where some "
        "classes are rare among all clients, give `released=0.1`.",
        "Where clients differ in their inputs alone; where test examples are not of the classes that a "
        "client trains on; around a model that was trained on the client's own examples, unless "
        "`train=True`.",
        (),
        {"prior_corrected": "`prior_corrected(dp_fedavg(...), train=True)`"},
    ),
    Page(
        "matrix_scaled", "Maps of logits", ("matrix_scaled",),
        "Around a method that shares a model, wherever clients differ in their labels: a map of K x K numbers is learned "
        "from a few dozen examples. With `train=40.0` clients may even name the same things differently.",
        "Where clients have fewer examples than classes; where there are hundreds of classes, because every step of a "
        "fit costs K x K products for each example.",
        ("map",),
        {"matrix_scaled": "`matrix_scaled(dp_fedavg(...), train=20.0)`"},
    ),
    Page(
        "mixed", "Mixture with a local model", ("mixed",),
        "Where it is unclear whether federation pays, as with few clients or much noise: each client "
        "weighs the method against training alone, on examples left out.",
        "Where evaluations are frequent, since each trains several models for every client; where "
        "clients have a handful of examples, too few to weigh by.",
        (),
        {"mixed": "`mixed(prior_corrected(dp_fedavg(...)))`"},
    ),
    Page(
        "fedbuff", "FedBuff", ("fedbuff",),
        "Around a method, to see what stale starts cost it.",
        "To account for a real asynchronous deployment whose cohorts are not drawn as the sampler says.",
    ),
    Page(
        "byzantine", "Lying clients", ("byzantine",),
        "Around a method, with `Median`, `TrimmedMean` or `Krum` for its mechanism, to see what lies cost.",
        "Together with a claim of privacy: the robust mechanisms have no epsilon.",
    ),
)  # fmt: skip
