# The CUDA backend, where it is built (find_cuda.cmake).
if(NOT BALLAST_HAS_CUDA)
  return()
endif()

# Of all that nvcc compiles, tests' kernels too: warnings are errors on either side. nvcc itself writes
# old-style designators into the host's side of templates.
add_library(ballast_kernel_options INTERFACE)
target_compile_options(ballast_kernel_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;--expt-relaxed-constexpr>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Werror,-Wno-unused-parameter,-Wno-gnu-designator,-ffp-contract=off>")

# The kernels.
set(kernels adam attention_backward attention_forward cross_entropy embedding gelu gradient layer_norm unit_norm)
list(TRANSFORM kernels PREPEND cuda/kernels/)
list(TRANSFORM kernels APPEND .cu)
add_library(ballast_cuda_kernels STATIC ${kernels})
add_library(ballast::cuda_kernels ALIAS ballast_cuda_kernels)
target_link_libraries(ballast_cuda_kernels PUBLIC CUDA::cudart_static absl::status absl::strings
                      PRIVATE ballast_options ballast_kernel_options)
target_include_directories(ballast_cuda_kernels PUBLIC ${PROJECT_SOURCE_DIR})
# Those that equal the service's arithmetic to the bit.
set_source_files_properties(cuda/kernels/adam.cu cuda/kernels/gradient.cu
                            PROPERTIES COMPILE_OPTIONS -fmad=false)

# The device, its matrix products, NCCL, and a run that is made of them. Its kernels are linked after
# it, where they are needed.
ballast_library(cuda
  SOURCES
    cuda/cublaslt_algorithm.cc
    cuda/cublaslt_matmul.cc
    cuda/cuda_device.cc
    cuda/gpu_failure.cc
    run/gpu_run.cc
    cuda/libraries.cc
    cuda/nccl_collective.cc
    cuda/nccl_communicator.cc
    cuda/nvtx.cc
  DEPS ballast::device ballast::worker CUDA::cudart_static absl::status absl::statusor absl::strings
       absl::str_format ${CMAKE_DL_LIBS})
# A program without kernels links what does not call them.
set_target_properties(ballast_cuda PROPERTIES UNITY_BUILD OFF)
target_include_directories(ballast_cuda SYSTEM PUBLIC
  ${BALLAST_CUBLASLT_INCLUDE} ${BALLAST_NCCL_INCLUDE})
