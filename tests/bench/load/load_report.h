// What a load showed, as figures and in a few lines.
#ifndef BALLAST_TESTS_BENCH_LOAD_LOAD_REPORT_H_
#define BALLAST_TESTS_BENCH_LOAD_LOAD_REPORT_H_

#include <string>

#include "tests/bench/figures.h"
#include "tests/bench/load/load_options.h"
#include "tests/bench/load/load_run.h"

namespace ballast::bench {

Figures FiguresOf(const LoadOptions& options, const LoadResult& result);
std::string TextOf(const Figures& figures);

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_LOAD_LOAD_REPORT_H_
