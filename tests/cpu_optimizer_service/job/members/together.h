// The state of a job with several members against that of the same job on one host.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TOGETHER_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TOGETHER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cpu_optimizer_service/job/job.h"
#include "cpu_optimizer_service/state/snapshot.h"

namespace ballast {

// Whether the members' parts are together the state of `whole`, bit for bit.
inline void ExpectTogether(const std::vector<Job*>& parts, Job& whole) {
  const LayoutSpec& spec = whole.spec().layout;
  std::vector<int> all;
  for (size_t p = 0; p < spec.parameters.size(); ++p) {
    if (spec.parameters[p].trainable) all.push_back(static_cast<int>(p));
  }
  const Snapshot expected = whole.TakeSnapshot(all).value();
  int64_t compared = 0;
  for (Job* const part : parts) {
    const Snapshot here = part->TakeSnapshot(all).value();
    ASSERT_EQ(here.step(), expected.step());
    for (int chunk = 0; chunk < static_cast<int>(part->layout().chunks().size()); ++chunk) {
      part->layout().VisitPieces(chunk, [&](const ChunkPiece& piece) {
        for (const Plane plane : {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}) {
          std::vector<float> mine(piece.elements);
          std::vector<float> theirs(piece.elements);
          here.Read(piece.parameter, plane, piece.parameter_offset, absl::MakeSpan(mine));
          expected.Read(piece.parameter, plane, piece.parameter_offset, absl::MakeSpan(theirs));
          ASSERT_EQ(mine, theirs) << "parameter " << piece.parameter;
        }
        compared += piece.elements;
      });
    }
    for (const int p : all) ASSERT_EQ(here.update_count(p), expected.update_count(p));
  }
  int64_t elements = 0;
  for (const int p : all) elements += whole.layout().place(p).elements;
  ASSERT_EQ(compared, elements);
}

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_TOGETHER_H_
