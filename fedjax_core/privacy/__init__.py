"""Privacy: mechanisms, calibration, accounting and audits."""

from fedjax_core.privacy.accounting import Adjacency as Adjacency
from fedjax_core.privacy.accounting import compose as compose
from fedjax_core.privacy.accounting import epsilon as epsilon
from fedjax_core.privacy.accounting import noise_multiplier_for as noise_multiplier_for
from fedjax_core.privacy.accounting import sensitivity as sensitivity
from fedjax_core.privacy.auditing import Audit as Audit
from fedjax_core.privacy.auditing import Score as Score
from fedjax_core.privacy.auditing import audit as audit
from fedjax_core.privacy.auditing import audit_outputs as audit_outputs
from fedjax_core.privacy.auditing import epsilon_from_errors as epsilon_from_errors
from fedjax_core.privacy.auditing import trade_off_slack as trade_off_slack
from fedjax_core.privacy.calibration import finite_delta as finite_delta
from fedjax_core.privacy.calibration import gaussian_delta as gaussian_delta
from fedjax_core.privacy.calibration import gaussian_rdp as gaussian_rdp
from fedjax_core.privacy.calibration import gaussian_sigma as gaussian_sigma
from fedjax_core.privacy.calibration import (
    gaussian_sigma_classical as gaussian_sigma_classical,
)
from fedjax_core.privacy.calibration import laplace_scale as laplace_scale
from fedjax_core.privacy.calibration import rdp_epsilon as rdp_epsilon
from fedjax_core.privacy.calibration import renyi_divergence as renyi_divergence
from fedjax_core.privacy.concentrated import Budget as Budget
from fedjax_core.privacy.concentrated import DynamicBudget as DynamicBudget
from fedjax_core.privacy.concentrated import SplitBudget as SplitBudget
from fedjax_core.privacy.concentrated import budget_epsilon as budget_epsilon
from fedjax_core.privacy.concentrated import gaussian_budget as gaussian_budget
from fedjax_core.privacy.concentrated import (
    minimiser_sensitivity as minimiser_sensitivity,
)
from fedjax_core.privacy.concentrated import spend as spend
from fedjax_core.privacy.features import Projection as Projection
from fedjax_core.privacy.features import cross_covariance as cross_covariance
from fedjax_core.privacy.features import gaussian_leakage as gaussian_leakage
from fedjax_core.privacy.features import private_lda as private_lda
from fedjax_core.privacy.features import private_projection as private_projection
from fedjax_core.privacy.features import reconstruction_error as reconstruction_error
from fedjax_core.privacy.gaussian import gaussian_mean as gaussian_mean
from fedjax_core.privacy.gaussian import noisy as noisy
from fedjax_core.privacy.information import Funnel as Funnel
from fedjax_core.privacy.information import (
    gaussian_mutual_information as gaussian_mutual_information,
)
from fedjax_core.privacy.information import mutual_information as mutual_information
from fedjax_core.privacy.information import privacy_funnel as privacy_funnel
from fedjax_core.privacy.logistic import Certainty as Certainty
from fedjax_core.privacy.logistic import CertaintyConfig as CertaintyConfig
from fedjax_core.privacy.logistic import certainty as certainty
from fedjax_core.privacy.mechanisms import Stage as Stage
from fedjax_core.privacy.mechanisms import add_gaussian as add_gaussian
from fedjax_core.privacy.mechanisms import add_laplace as add_laplace
from fedjax_core.privacy.mechanisms import concatenate as concatenate
from fedjax_core.privacy.mechanisms import constant as constant
from fedjax_core.privacy.mechanisms import random_labels as random_labels
from fedjax_core.privacy.mechanisms import randomised_response as randomised_response
from fedjax_core.privacy.mechanisms import replace_features as replace_features
from fedjax_core.privacy.mechanisms import response_probability as response_probability
from fedjax_core.privacy.mechanisms import subsample as subsample
