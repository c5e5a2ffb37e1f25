"""The pages of the methods: their builders, when to use them and when not, and their results.

The docstring of a builder has what the method computes and guarantees.
"""

from typing import NamedTuple


class Page(NamedTuple):
    """A page of some methods, with the privacy statements of small planned runs.

    Args:
        slug: Name of the page's file.
        title: Title of the page.
        names: Builders in `jaxfl.algorithms`.
        use: Text on when to use the methods.
        avoid: Text on when not to use them.
        measured: Pages of results, by the names of `pages.readmes`.
        rows: Labels of the runs by their names in `tests/algorithms_table.py`. None takes the runs
            with the names of the builders.
        note: Further text.
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
        "fedavg",
        "Local training, FedAvg and FedProx",
        ("local_only", "fedavg", "fedprox"),
        "Use these methods as references. Every federated method must beat `local_only`, which "
        "sends nothing and costs no epsilon. `fedavg` shows what one shared model reaches without "
        "privacy. `fedprox` is for many local steps on clients that differ, where their models "
        "drift apart.",
        "`fedavg` and `fedprox` are not private: they neither clip nor add noise unless you give "
        "them a mechanism. Compare with a local baseline that was trained to its own best round, "
        "as `compare` does.",
        ("fedavg", "methods", "text"),
    ),
    Page(
        "dp_fedavg",
        "DP-FedAvg",
        ("dp_fedavg", "dp_fedavg_fb"),
        "Use `dp_fedavg` as a private baseline, which other methods should beat. `dp_fedavg_fb` "
        "costs no further epsilon, because each client fits its head on its own data and sends "
        "nothing of it. With `sampling=FixedSize(m)`, `dp_fedavg` is GDP-FL (Geyer et al. 2017) "
        "with a constant clip bound.",
        "Avoid it with few clients. The noise on the mean falls with the cohort, and with some "
        "dozens of clients training alone is hard to beat.",
        ("dp_pfeddsu", "mechanisms", "text", "lora", "feddpa", "audit"),
    ),
    Page(
        "dp_fedavg_mixed",
        "The map's recipe",
        ("dp_fedavg_mixed",),
        "Try this method first. Each client maps the logits of a private shared model to its own "
        "classes, trains the model further, and mixes it with a model that it trains alone. The "
        "method has the epsilon of DP-FedAvg.",
        "Avoid it if evaluation must be fast, because every client trains its own model "
        "`folds + 1` times. By default it needs a classification.",
        ("map",),
    ),
    Page(
        "fedrep",
        "FedRep and CENTAUR",
        ("fedrep", "centaur"),
        "Use these methods if clients have different labels and similar features. Heads need no "
        "noise, because they never leave their clients, and fewer numbers get noise.",
        "Avoid them if heads are published, which voids the guarantee, or if heads have too few "
        "examples of their own.",
        ("dp_pfeddsu", "audit"),
    ),
    Page(
        "ppsgd",
        "PPSGD",
        ("ppsgd", "ppsgd_centaur"),
        "Use it for a personal head on top of a shared one, with one gradient step a round. "
        "`ppsgd_centaur` has local epochs.",
        "Avoid `ppsgd` if rounds are expensive, because each round moves by one batch only.",
        ("dp_pfeddsu",),
    ),
    Page(
        "one_shot",
        "One noisy sum: ridge and prototypes",
        ("dp_ridge", "dp_prototypes"),
        "Use these methods for a linear classifier on public pretrained features, if one release "
        "must replace many rounds. Each client corrects the shared head by its own examples at no "
        "cost in privacy.",
        "Avoid them if the features must be learned from the clients. With a random extractor both "
        "methods fit a linear model of random features.",
    ),
    Page(
        "fedrod",
        "FedRoD",
        ("fedrod",),
        "Use it if labels differ by client. The shared model is trained as if they did not differ, "
        "and a personal head adds what the client's own labels show. Compare it with "
        "`prior_corrected`, which needs no training.",
        "Avoid it if inputs differ and labels do not, because the balanced loss then equals the "
        "usual one.",
    ),
    Page(
        "dp_pfeddsu",
        "DP-pFedDSU",
        ("dp_pfeddsu", "dp_pfeddsu_paper"),
        "Use it for a sparse extractor whose mask follows from what is broadcast, so that fewer "
        "dimensions get noise. `dp_pfeddsu_paper` shows what is published.",
        "Never use `dp_pfeddsu_paper` for a release. Its noise lies on private masks only, and no "
        "finite epsilon holds.",
        ("dp_pfeddsu", "audit"),
    ),
    Page(
        "pmtl",
        "PMTL and MR-MTL",
        ("pmtl", "pmtl_ft", "mr_mtl"),
        "Use these methods for a complete personal model that stays near the mean. `pmtl` protects "
        "a client. `mr_mtl` is for silos with many examples each, and protects single examples "
        "from everybody, including the server.",
        "Avoid them without tuning the penalty weight, which decides between local training and "
        "one model. `mr_mtl` gives no epsilon for all data of a silo.",
        ("dp_pfeddsu",),
    ),
    Page(
        "ditto",
        "Ditto",
        ("ditto",),
        "Use it for a complete personal model per client, next to a shared model that is trained "
        "as if no client were personal.",
        "Avoid it if a client cannot store a full model, or cannot train twice. Fine-tuning the "
        "head of a shared model is cheaper, and was better in two of the three measured seeds.",
        ("methods",),
    ),
    Page(
        "apfl",
        "APFL",
        ("apfl",),
        "Use it if it is unclear how personal a model should be. Each client learns its own "
        "mixture.",
        "Avoid it if local time matters, because a batch needs three gradients.",
        ("methods",),
    ),
    Page(
        "ifca",
        "IFCA",
        ("ifca",),
        "Use it if clients come in a few kinds that their labels do not reveal, such as rotated "
        "pictures or labels with another meaning. Every kind gets a model of its own.",
        "Avoid it if clients are of one kind, or of as many kinds as clients. Each model then "
        "learns from fewer clients under the same noise.",
    ),
    Page(
        "pfedme",
        "pFedMe",
        ("pfedme",),
        "Use it for personal models whose distance from the shared model you control.",
        "Avoid it if local time matters, because a batch needs K gradients. Avoid it also if the "
        "shared model is used, because only the personal models gain.",
        ("methods",),
    ),
    Page(
        "per_fedavg",
        "Per-FedAvg",
        ("per_fedavg",),
        "Use it for a shared start that adapts well in one or two steps of a client. Clients keep "
        "no state.",
        "Avoid it for clients with many examples, which can train longer than the few steps that "
        "it prepares for.",
        ("methods",),
    ),
    Page(
        "scaffold",
        "SCAFFOLD",
        ("scaffold",),
        "Use it for one shared model with many local steps, clients that differ strongly, and few "
        "rounds.",
        "Be careful with noise, because a message is twice as long, and one clip bound and one "
        "noise cover both halves. Clients must keep a state.",
        ("methods",),
    ),
    Page(
        "server_optimizers",
        "FedAdam, FedYogi, FedAdagrad",
        ("fedadam", "fedyogi", "fedadagrad"),
        "Pass these optimizers as `server_optimizer=` to any method that sends updates, if "
        "coordinates need different rates.",
        "Avoid them under strong noise without tuning `tau`, because noise enters the second "
        "moment too.",
        ("methods",),
        {},
        "The privacy of a run is that of the method, because a server's step is post-processing.",
    ),
    Page(
        "dp_fedsam",
        "DP-FedSAM",
        ("dp_fedsam",),
        "Try this variant of DP-FedAvg if clipping and noise hurt. It takes twice the local time.",
        "Tune DP-FedAvg itself first.",
    ),
    Page(
        "fed_smp",
        "Fed-SMP",
        ("fed_smp",),
        "Use it for networks much larger than their noise allows. A public random mask reduces how "
        "many weights get noise in a round, and how much of an update is clipped.",
        "Avoid it for small networks, in which every weight counts in every round.",
    ),
    Page(
        "blur_lus",
        "BLUR and LUS",
        ("blur_lus",),
        "Use it if updates are far longer than the clip bound. A penalty keeps them short during "
        "training.",
        "It does not save noise by sparsity. Masks are private here, so all weights get noise.",
    ),
    Page(
        "adp_pfl",
        "ADP-PFL",
        ("adp_pfl", "adp_pfl_paper"),
        "Use it if noise should differ by round, or by the client's leakage risk. The risk is "
        "released with noise, and a filter stops each client at its budget.",
        "Avoid it for a first private model, because budgets by risk cost epsilon of their own.",
        ("adp_pfl", "audit"),
        {
            "adp_pfl": "`adp_pfl`",
            "adp_pfl_released": "`adp_pfl`, private risks",
            "adp_pfl_paper": "`adp_pfl_paper`, private risks",
        },
    ),
    Page(
        "dp_lg",
        "LG-FedAvg with DP",
        ("dp_lg",),
        "Use it for clients whose inputs differ and whose labels mean the same. Extractors stay on "
        "their clients, and the head is shared.",
        "Avoid it for clients with few examples, which cannot train an extractor.",
        ("adp_pfl",),
    ),
    Page(
        "padpfl",
        "PADPFL and NbAFL",
        ("padpfl", "padpfl_paper"),
        "Use it for public weights by client and round, for instance of known data quality.",
        "Avoid it if weights would follow from private data, because they count as public. Unequal "
        "weights need more noise on the sum.",
        ("padpfl", "audit"),
    ),
    Page(
        "pdp_fl",
        "PDP-FL and LDP-Fed",
        ("pdp_fl", "pdp_fl_paper"),
        "Use it if every client names its own epsilon for its uploads.",
        "Avoid it if the server is trusted with uploads, because noise on the sum alone is far "
        "smaller.",
        ("pdp_fl", "audit"),
    ),
    Page(
        "feddpa",
        "FedDPA",
        ("feddpa", "feddpa_paper"),
        "Use it for personal coordinates that are chosen by Fisher information, not by a fixed "
        "head. `feddpa_paper` shows what its published noise guarantees.",
        "Never release a run of `feddpa_paper` by its claim. The honest epsilon, which its "
        "statement also has, is far larger.",
        ("feddpa", "audit"),
    ),
    Page(
        "fine_tuned",
        "Fine-tuning before evaluation",
        ("fine_tuned",),
        "Try this personalization first around a method that shares a model. It costs no epsilon, "
        "and clients keep nothing between rounds.",
        "Avoid it if clients have too few examples to train a full model. In this case, name a "
        "part of the model, such as the head.",
        (),
        {"fine_tuned": "`fine_tuned(prior_corrected(dp_fedavg(...)))`"},
    ),
    Page(
        "prior_corrected",
        "Correction by a client's own classes",
        ("prior_corrected",),
        "Use it wherever clients differ in how often they have each class. Their own counts cost "
        "no epsilon. A method that is compared without them may only show that its clients learn "
        "these counts. Put it inside fine-tuning, because `fine_tuned(prior_corrected(method))` "
        "trains with the correction. Give `released=0.1` if some classes are rare among all "
        "clients.",
        "Avoid it if only the clients' inputs differ, or if test examples have other classes than "
        "the client's training examples. Avoid it also around a model that was trained on the "
        "client's own examples, unless `train=True`.",
        (),
        {"prior_corrected": "`prior_corrected(dp_fedavg(...), train=True)`"},
    ),
    Page(
        "matrix_scaled",
        "Maps of logits",
        ("matrix_scaled",),
        "Use it around a method that shares a model, wherever clients differ in their labels. A "
        "map of K x K numbers is learned from a few dozen examples. With `train=40.0` clients may "
        "even name the same things differently.",
        "Avoid it if clients have fewer examples than classes. Avoid it also with hundreds of "
        "classes, because every step of a fit costs K x K products for each example.",
        ("map",),
        {"matrix_scaled": "`matrix_scaled(dp_fedavg(...), train=20.0)`"},
    ),
    Page(
        "mixed",
        "Mixture with a local model",
        ("mixed",),
        "Use it if it is unclear whether federation helps, as with few clients or much noise. Each "
        "client weighs the method against training alone, on held-out examples.",
        "Avoid it if evaluations are frequent, because each evaluation trains several models for "
        "every client. Avoid it also if clients have a handful of examples, which are too few to "
        "weigh by.",
        (),
        {"mixed": "`mixed(prior_corrected(dp_fedavg(...)))`"},
    ),
    Page(
        "fedbuff",
        "FedBuff",
        ("fedbuff",),
        "Use it around a method to measure the cost of stale starts.",
        "It does not account for a real asynchronous deployment, whose cohorts are not drawn as "
        "the sampler says.",
    ),
    Page(
        "byzantine",
        "Lying clients",
        ("byzantine",),
        "Use it around a method, with `Median`, `TrimmedMean` or `Krum` as its mechanism, to "
        "measure the cost of lies.",
        "Never combine it with a claim of privacy, because the robust mechanisms have no epsilon.",
    ),
)
