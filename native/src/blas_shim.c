/* The two functions of a BLAS that mlx calls on a Linux CPU, under their plain names, forwarded to OpenBLAS as the
   package scipy-openblas32 ships it, with a prefix before every name. Loaded for the whole process before mlx, it
   takes the place of the reference BLAS that mlx brings. */

#define FORWARD(name, real)                                                                                       \
  void scipy_##name(int order, int transpose_a, int transpose_b, int m, int n, int k, real alpha, const real *a,  \
                    int lda, const real *b, int ldb, real beta, real *c, int ldc);                                \
  void name(int order, int transpose_a, int transpose_b, int m, int n, int k, real alpha, const real *a, int lda, \
            const real *b, int ldb, real beta, real *c, int ldc) {                                                \
    scipy_##name(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                  \
  }

FORWARD(cblas_sgemm, float)
FORWARD(cblas_dgemm, double)
