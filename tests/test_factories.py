"What a user passes to gymnasium reaches it, whatever is passed by default."

import pytest
from gymnasium.wrappers import PassiveEnvChecker

from rollpipe.pipes.envs.factories import EnvFactory, VectorFactory


def wrappers(env):
    "The classes around an environment, from outside to inside."
    while env is not env.unwrapped:
        yield type(env)
        env = env.env


@pytest.mark.parametrize(
    "env_kwargs, checked",
    [({}, False), (dict(disable_env_checker=True), False), (dict(disable_env_checker=False), True)],
)
def test_the_user_decides_about_the_checker_of_gymnasium(env_kwargs, checked):
    env = EnvFactory("CartPole-v1", env_kwargs)()
    assert (PassiveEnvChecker in wrappers(env)) == checked
    env.close()


@pytest.mark.parametrize("disabled", [True, False])
def test_so_it_is_in_a_vector(disabled):
    envs = VectorFactory("CartPole-v1", 2, env_kwargs=dict(disable_env_checker=disabled))()
    assert (PassiveEnvChecker in wrappers(envs.envs[0])) == (not disabled)
    envs.close()
