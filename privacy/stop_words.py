"""English function words: a public list, fixed here.

ATDP keeps the weight of "frequent function tokens" at 1. Counted on the private texts, which words are frequent would
itself be a private statistic; a list of the closed word classes is not.
"""

STOP_WORDS = frozenset(
    """
    a an the
    this that these those each every either neither some any all both few many much more most several such no other
    another own same
    i you he she it we they me him her us them my your his its our their mine yours hers ours theirs
    myself yourself himself herself itself ourselves themselves who whom whose which what
    am is are was were be been being have has had having do does did doing will would shall should may might must can
    could
    about above across after against along among around as at before behind below beneath beside between beyond by
    despite down during except for from in inside into like near of off on onto out outside over past per since
    through throughout to toward towards under until up upon via with within without
    and but or nor so yet if because although though while whereas unless than whether when where why how
    not never also too very just only even still then there here now again once ever almost already
    """.split()
)
"""Articles, determiners, pronouns, auxiliaries, prepositions, conjunctions, and the commonest adverbs; lower case."""
