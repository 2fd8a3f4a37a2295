"""Models: what a model is, layers that compile well, and the standard ones."""

from fedjax_core.models.model import Model as Model
from fedjax_core.models.model import classifier as classifier
from fedjax_core.models.model import language_model as language_model
from fedjax_core.models.zoo import CNN as CNN
from fedjax_core.models.zoo import MLP as MLP
from fedjax_core.models.zoo import CharLSTM as CharLSTM
from fedjax_core.models.zoo import char_lstm as char_lstm
from fedjax_core.models.zoo import cifar_cnn as cifar_cnn
from fedjax_core.models.zoo import emnist_cnn as emnist_cnn
from fedjax_core.models.zoo import logistic_regression as logistic_regression
from fedjax_core.models.zoo import mlp as mlp
