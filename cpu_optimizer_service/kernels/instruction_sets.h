// The least instruction set that kernels are compiled for; Highway adds those above it. Include
// this before any header of Highway.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_INSTRUCTION_SETS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_INSTRUCTION_SETS_H_

// SSE4.2 and AES, which x86 servers have had since 2010, are the least. Below them Highway has only
// an emulation, also of products without carry, which is slow to run, and takes many minutes to
// compile with sanitizers.
#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_KERNELS_INSTRUCTION_SETS_H_
