"""The method. Read the files in this order; together they are ARPO and its relatives, chosen by settings.

1. rollout    M trajectories per task, as a tree. N start at the prompt. After each tool result the first k sampled
              tokens are probed, and branches open where entropy rose. The rest of M start at the end.
2. branching  dH = (H - H_initial) / ln V,  P = alpha + beta dH,  branch Z times if P > tau.
   posthoc    Where to branch when all trajectories have ended: by entropy, by outcome, at the tail, at random.
3. advantage  A_i = (R_i - mean R) / std R over the trajectories of a task; leave_one_out, batch and tree are variants.
              Attribution: every token of trajectory i gets A_i (soft), or shared tokens get the mean A (hard).
4. batch      Trees packed depth first, every unique token once; `loss.aggregation` gives the weights w.
5. loss       - sum w min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprob - old logprob), over all trajectories
              but computed once per unique token; GSPO and CISPO; entropy bonus and KL penalty.
6. metrics    What is logged for a step.

branching, posthoc, advantage, batch, loss and metrics are pure functions; only rollout waits for engine and tools. The
forward and backward pass over a batch is in `arpo.trainer`, the loop over steps in `arpo.training`.

May import: types, errors, config, net, figures, runs, data, tools, rewards, models, engine, agent.
"""
