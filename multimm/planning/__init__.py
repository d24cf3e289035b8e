"""Plans: pure values and integers, made before anything runs.

`choice.plan_matmul` makes a `MatmulPlan` of a `Problem` and a `ClusterSpec`. A *layout* is one
`Schedule`, a *candidate* one that is laid out to be compared, and a *rank* the number of a worker.

========================================= =======================================================
module                                    question
========================================= =======================================================
`problem`, `matrix`                       what is multiplied, in which chunks, and where these lie
`hardware`, `devices`                     which workers there are, and how fast
`options`                                 what the caller fixed
`choice`                                  which layout is taken, and when nothing is searched for
`search`                                  which arrangements of the workers are tried, cut how
`candidates`                              layouts that the search does not find, or changes of some
`blocking`, `tiling`                      how large blocks and k-tiles are, and where they are cut
`schedule`                                one layout: the order of all, by the answers of the next
`work`, `distribution`, `owner_computes`  who computes what, who keeps A and B, what travels
`cost`                                    bytes moved, memory held, seconds of a layout
`plan`, `explain`                         what a user reads
`limits`, `advice`                        what is refused, and what would do instead
========================================= =======================================================
"""
