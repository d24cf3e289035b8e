"""Dask graphs of block products. Dask's internals are known here, and in `multimm.cluster`.

`array.build` makes a lazy array of a plan. `lowering` makes its tasks, `block_task` and `label` are
what a task is and says, and `tasks` is what runs on workers. `scheduler` places tasks, and replaces
lost workers. What is known of operands comes from their graphs: `lazy_views` (transposes),
`same_values` (symmetric products), `data_location` (where blocks lie), `shared_reads` and
`made_again` (who reads or makes blocks). `rearranged` and `taken_apart` are for contractions.
"""
