"Trainings by policy gradients."

from rollpipe.agents import A2C, NPG, PPO, REINFORCE, TRPO, VTrace
from rollpipe.layers import MemoryCritic, RecurrentPolicy
from rollpipe.pipes import on_policy, rollouts

from .tools import trained
from .worlds import Hybrid, Push, Walk, critic, policy

SMALL = dict(n_envs=4, n_steps=16, lanes=2, seed=0)


def _cartpole(agent, make=on_policy, **kwargs):
    actor = policy("CartPole-v1")
    judge = critic("CartPole-v1")
    pipe = (
        on_policy("CartPole-v1", actor, judge, **SMALL)
        if make is on_policy
        else make("CartPole-v1", actor, **SMALL)
    )
    yield from trained(agent(actor, judge, **kwargs), pipe)


def trpo():
    yield from _cartpole(TRPO)


def npg():
    yield from _cartpole(NPG)


def ppo():
    yield from _cartpole(PPO, epochs=3, minibatch=32)


def a2c():
    yield from _cartpole(A2C)


def reinforce():
    yield from _cartpole(REINFORCE, epochs=2)


def vtrace():
    yield from _cartpole(VTrace, rollouts)


def trpo_options():
    yield from _cartpole(
        TRPO, fvp_subsample=0.3, backtrack=0.5, normalize_adv=False, damping=0.01, critic_epochs=1
    )


def npg_fixed_rate():
    yield from _cartpole(NPG, lr=0.05, cg_iters=3)


def ppo_options():
    options = dict(
        epochs=2,
        minibatch=32,
        clip_value=0.2,
        target_kl=0.01,
        c_entropy=0.01,
        normalize_adv="minibatch",
        critic_lr=1e-2,
    )
    yield from _cartpole(PPO, **options)


def a2c_options():
    yield from _cartpole(A2C, c_entropy=0.01, normalize_adv=True, max_grad_norm=None)


def vtrace_options():
    yield from _cartpole(VTrace, rollouts, lam=0.9, rho_clip=2.0, c_clip=1.5, c_entropy=0.01)


def trpo_on_pendulum():
    actor = policy("Pendulum-v1")
    judge = critic("Pendulum-v1")
    yield from trained(
        TRPO(actor, judge), on_policy("Pendulum-v1", actor, judge, n_envs=4, n_steps=64, seed=0)
    )


def ppo_on_hybrid_actions():
    actor = policy(Hybrid)
    judge = critic(Hybrid)
    yield from trained(
        PPO(actor, judge, epochs=2, minibatch=40), on_policy(Hybrid, actor, judge, **SMALL)
    )


def _recurrent(env, agent, sticky=False, **kwargs):
    actor = policy(env, RecurrentPolicy, memory=6, past=True, report=True)
    judge = critic(env, MemoryCritic, memory=6)
    yield from trained(
        agent(actor, judge, **kwargs), on_policy(env, actor, judge, sticky=sticky, **SMALL)
    )


def ppo_recurrent():
    yield from _recurrent(Walk, PPO, epochs=2, minibatch=32)


def trpo_recurrent_sticky():
    yield from _recurrent(Push, TRPO, sticky=True, fvp_subsample=0.5)


def ppo_recurrent_sticky():
    yield from _recurrent(Push, PPO, sticky=True, epochs=2, minibatch=32)


def a2c_recurrent():
    yield from _recurrent(Hybrid, A2C)


def vtrace_recurrent():
    yield from _recurrent(Walk, VTrace)


def reinforce_recurrent():
    yield from _recurrent(Walk, REINFORCE)


def npg_recurrent():
    yield from _recurrent(Walk, NPG)
