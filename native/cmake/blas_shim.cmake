# _blas: mlx's cblas_sgemm and cblas_dgemm, forwarded to the OpenBLAS of the package scipy-openblas32.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
    "import scipy_openblas32 as blas; print(blas.get_lib_dir(), blas.get_library(), sep=';')"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE TINYKV_OPENBLAS RESULT_VARIABLE TINYKV_OPENBLAS_MISSING ERROR_QUIET)
if(TINYKV_OPENBLAS_MISSING)
  message(STATUS "scipy-openblas32 isn't installed: no _blas is built")
  return()
endif()

list(GET TINYKV_OPENBLAS 0 TINYKV_OPENBLAS_DIR)
list(GET TINYKV_OPENBLAS 1 TINYKV_OPENBLAS_NAME)
add_library(_blas MODULE src/blas_shim.c)
set_target_properties(_blas PROPERTIES PREFIX "" BUILD_WITH_INSTALL_RPATH TRUE
  INSTALL_RPATH "$ORIGIN/../scipy_openblas32/lib")
target_link_directories(_blas PRIVATE "${TINYKV_OPENBLAS_DIR}")
target_link_libraries(_blas PRIVATE "${TINYKV_OPENBLAS_NAME}")
install(TARGETS _blas LIBRARY DESTINATION tinykv_native)
