"""HiPPO-LegS: the matrix whose state holds the past in Legendre polynomials."""

import numpy as np


def hippo_normal(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  r"""The normal part of HiPPO-LegS, diagonal: A = V (diag(lambda) - p p^*) V^*, float64.

      A_nk = -sqrt((2 n + 1) (2 k + 1)) for n > k,   -(n + 1) for n = k,   0 for n < k
      A + P P^T = -1/2 I + (a skew-symmetric matrix),      P_n = sqrt(n + 1/2),      p = V^* P

  Returns:
    lambda [size], complex, in ascending order of its imaginary parts, which come in pairs +-w;
    V [size, size], unitary, its first row positive; P [size], real.

  Source: S4 (Gu et al. 2022), section 3.2 and appendix C.2.
  """
  n = np.arange(size)
  p = np.sqrt(n + 0.5)
  skew = -np.tril(np.outer(p, p), -1)
  frequencies, v = np.linalg.eigh(-1j * (skew - skew.T))
  # An eigenvector has any phase, and that of LAPACK depends on the processor.
  return -0.5 + 1j * frequencies, v * (v[0].conj() / np.abs(v[0])), p


def positive_frequencies(count: int) -> np.ndarray:
  """The normal part's eigenvalues of positive imaginary part, for size 2 `count`, ascending."""
  return hippo_normal(2 * count)[0][count:]
