"""Fair mixing: coefficients of the clients' updates, decided from their losses."""

from fedjax_core.fair.decider import Decider as Decider
from fedjax_core.fair.decider import Told as Told
from fedjax_core.fair.decider import play as play
from fedjax_core.fair.decider import static as static
from fedjax_core.fair.decider import tilted as tilted
from fedjax_core.fair.responses import CDFS as CDFS
from fedjax_core.fair.responses import decision_gradient as decision_gradient
from fedjax_core.fair.responses import decision_loss as decision_loss
from fedjax_core.fair.responses import doubly_robust as doubly_robust
from fedjax_core.fair.responses import linearised_gradient as linearised_gradient
from fedjax_core.fair.responses import respond as respond
from fedjax_core.fair.responses import shrinkage as shrinkage
from fedjax_core.fair.simplex import minimise as minimise
from fedjax_core.fair.simplex import project as project
from fedjax_core.fair.theory import ftrl_bound as ftrl_bound
from fedjax_core.fair.theory import lipschitz as lipschitz
from fedjax_core.fair.theory import lipschitz_of_estimates as lipschitz_of_estimates
from fedjax_core.fair.theory import ons_bound as ons_bound
from fedjax_core.fair.theory import regret as regret
