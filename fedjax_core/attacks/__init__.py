"""Attacks on data, on messages and on what they give away."""

from fedjax_core.attacks.data import Trigger as Trigger
from fedjax_core.attacks.data import attack_success as attack_success
from fedjax_core.attacks.data import clean_error as clean_error
from fedjax_core.attacks.data import flip_labels as flip_labels
from fedjax_core.attacks.data import plant_backdoor as plant_backdoor
from fedjax_core.attacks.data import poison_data as poison_data
from fedjax_core.attacks.inversion import Recovered as Recovered
from fedjax_core.attacks.inversion import fedgd_gradients as fedgd_gradients
from fedjax_core.attacks.inversion import from_fedrelax as from_fedrelax
from fedjax_core.attacks.inversion import from_gradients as from_gradients
from fedjax_core.attacks.inversion import invert_example as invert_example
from fedjax_core.attacks.inversion import invert_gradients as invert_gradients
from fedjax_core.attacks.inversion import nearest as nearest
from fedjax_core.attacks.messages import Attack as Attack
from fedjax_core.attacks.messages import add_noise as add_noise
from fedjax_core.attacks.messages import by_mark as by_mark
from fedjax_core.attacks.messages import choose as choose
from fedjax_core.attacks.messages import growing as growing
from fedjax_core.attacks.messages import high_loss as high_loss
from fedjax_core.attacks.messages import nudge as nudge
from fedjax_core.attacks.messages import poison as poison
from fedjax_core.attacks.messages import poisoned as poisoned
from fedjax_core.attacks.messages import random_update as random_update
from fedjax_core.attacks.messages import scale as scale
from fedjax_core.attacks.messages import smallest_attack as smallest_attack
