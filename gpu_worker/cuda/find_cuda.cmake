# CUDA and NCCL, found or left out (BALLAST_CUDA), never required. Sets BALLAST_HAS_CUDA.
#
# cuBLASLt and NCCL are needed as headers only: ballast_cuda loads them when a GPU is asked for
# (cuda/libraries.h), so that one binary runs on machines with and without them.
set(BALLAST_CUDA AUTO CACHE STRING "The CUDA backend: AUTO (where nvcc and NCCL are found), ON, OFF")
set_property(CACHE BALLAST_CUDA PROPERTY STRINGS AUTO ON OFF)
set(CMAKE_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPUs that kernels are compiled for")
set(BALLAST_HAS_CUDA FALSE)

# Leaves CUDA out, or stops where it was asked for.
macro(ballast_without_cuda reason)
  if(BALLAST_CUDA STREQUAL ON)
    message(FATAL_ERROR "BALLAST_CUDA=ON, but ${reason}")
  endif()
  message(STATUS "CUDA backend: left out, ${reason}")
  return()
endmacro()

if(NOT BALLAST_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "BALLAST_CUDA=${BALLAST_CUDA} must be AUTO, ON or OFF")
endif()
if(BALLAST_CUDA STREQUAL OFF)
  message(STATUS "CUDA backend: left out, BALLAST_CUDA=OFF")
  return()
endif()
if(BALLAST_SANITIZE)
  ballast_without_cuda("sanitizers do not see into nvcc's code (BALLAST_SANITIZE)")
endif()

find_program(BALLAST_NVCC nvcc
  HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
  PATHS /usr/local/cuda/bin)
if(NOT BALLAST_NVCC)
  ballast_without_cuda("there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${BALLAST_NVCC})
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  ballast_without_cuda("${BALLAST_NVCC} compiles nothing with ${CMAKE_CXX_COMPILER}")
endif()
enable_language(CUDA)
find_package(CUDAToolkit QUIET)
find_path(BALLAST_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV NCCL_HOME
          PATH_SUFFIXES include)
find_path(BALLAST_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
if(NOT TARGET CUDA::cudart_static OR NOT BALLAST_CUBLASLT_INCLUDE)
  ballast_without_cuda("the toolkit of ${BALLAST_NVCC} has no cudart or no cublasLt.h")
endif()
if(NOT BALLAST_NCCL_INCLUDE)
  ballast_without_cuda("there is no nccl.h")
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# CMake 3.25 does not know that nvcc with clang as its host compiler has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
set(BALLAST_HAS_CUDA TRUE)
message(STATUS "CUDA backend: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
               "GPUs ${CMAKE_CUDA_ARCHITECTURES}, NCCL's header in ${BALLAST_NCCL_INCLUDE}")
