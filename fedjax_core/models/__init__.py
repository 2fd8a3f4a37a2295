"""Models: what a model is, layers that compile well, and the standard ones."""

from fedjax_core.models.adapters import classifier as classifier
from fedjax_core.models.adapters import from_functions as from_functions
from fedjax_core.models.adapters import from_linen as from_linen
from fedjax_core.models.adapters import from_nnx as from_nnx
from fedjax_core.models.adapters import language_model as language_model
from fedjax_core.models.model import Ids as Ids
from fedjax_core.models.model import Model as Model
from fedjax_core.models.tasks import Task as Task
from fedjax_core.models.tasks import classes as classes
from fedjax_core.models.tasks import multi_label as multi_label
from fedjax_core.models.zoo import CNN as CNN
from fedjax_core.models.zoo import MLP as MLP
from fedjax_core.models.zoo import CharLSTM as CharLSTM
from fedjax_core.models.zoo import char_lstm as char_lstm
from fedjax_core.models.zoo import cifar_cnn as cifar_cnn
from fedjax_core.models.zoo import emnist_cnn as emnist_cnn
from fedjax_core.models.zoo import logistic_regression as logistic_regression
from fedjax_core.models.zoo import mlp as mlp
