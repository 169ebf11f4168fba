// How ranks put Muon's matrices together from their chunks, and take them apart again.
//
// They do it in turns, which bounds the memory. In a turn each rank makes at most one matrix. What
// the ranks have of the turn's matrices is all-gathered, each rank's in a slot; then what they have
// made, each rank's matrix in a slot.
#ifndef BALLAST_GPU_WORKER_MUON_MATRIX_TURNS_H_
#define BALLAST_GPU_WORKER_MUON_MATRIX_TURNS_H_

#include <cstdint>
#include <vector>

#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct MatrixTurn {
  // Elements of a matrix that are adjacent in a chunk.
  struct Piece {
    int turn_index = 0;  // Of `matrices`.
    int chunk = 0;
    int64_t chunk_offset = 0;
    int64_t matrix_offset = 0;
    int64_t slot_offset = 0;  // In the slot of the rank that has the chunk.
    int64_t elements = 0;
  };
  std::vector<int> matrices;  // Parameters. Rank i makes the i-th.
  std::vector<std::vector<Piece>> pieces_of_rank;
  int64_t slot_elements = 0;  // The most that any rank's slot has.
};

// All matrices of groups with two rounds. The same on all ranks. The matrices of a turn have similar
// costs, because its ranks wait for each other.
std::vector<MatrixTurn> TurnsOf(const TrainingJob& job);

struct MatrixShape {
  int64_t rows = 0;
  int64_t columns = 0;
};
MatrixShape ShapeOf(const TrainingJob& job, int parameter);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_MUON_MATRIX_TURNS_H_
