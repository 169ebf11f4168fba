// A job with a rule of two rounds (Muon) beside one of one round.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MUON_JOB_TEST_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MUON_JOB_TEST_H_

#include <cstdint>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {

class MuonJobTest : public JobDriverTest {
 protected:
  // Of 2 ranks: two matrices of Muon, which chunks cut, and what AdamW trains.
  static JobSpec MatricesSpec(int64_t bucket_elements) {
    JobSpec spec = MakeJobSpec({.group_sizes = {{30 * 20, 16 * 40}, {700}},
                                .world_size = 2,
                                .bucket_elements = bucket_elements,
                                .chunk_elements = bucket_elements / 2});
    spec.groups[0].hyper_parameters = DefaultsOf(Rule::kMuon);
    spec.layout.parameters[0].shape = {30, 20};
    spec.layout.parameters[1].shape = {16, 40};
    return spec;
  }
  static std::vector<float> Read(JobDriver& driver, int parameter, Plane plane) {
    std::vector<float> values(driver.layout().place(parameter).elements);
    driver.job()
        .TakeSnapshot({parameter})
        .value()
        .Read(parameter, plane, 0, absl::MakeSpan(values));
    return values;
  }
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MUON_JOB_TEST_H_
