// GPT-2 (gpt/architecture.h) on the CPU: weights of any format, fp32 arithmetic.
#ifndef BALLAST_GPU_WORKER_CPU_CPU_GPT_H_
#define BALLAST_GPU_WORKER_CPU_CPU_GPT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/training/model.h"

namespace ballast::worker {

// T is the type of all arithmetic: float, or double for tests of the formulas.
template <typename T>
class CpuGpt final : public Model {
 public:
  explicit CpuGpt(const GptConfig& config);

  const std::vector<int>& backward_order() const override { return backward_order_; }
  void Place(const Layout& layout, absl::Span<const int64_t> group_elements,
             DType weights_dtype) override;
  DType weights_dtype() const override { return weights_dtype_; }
  absl::Span<std::byte> weights(int group) override {
    return absl::MakeSpan(flat_spaces_[group].weights);
  }
  absl::Span<float> gradients(int group) override {
    return absl::MakeSpan(flat_spaces_[group].gradients);
  }
  double ForwardBackward(const Batch& batch, double loss_scale,
                         const std::function<void(int parameter)>& gradient_ready) override;

 private:
  struct FlatSpace {
    std::vector<std::byte> weights;
    std::vector<float> gradients;
  };
  struct PlaceInGroup {
    int group = 0;
    int64_t offset = 0;
    int64_t elements = 0;
  };
  // A block's forward results for its backward pass.
  struct BlockActivations {
    std::vector<T> in, normal_1, mean_1, rstd_1, qkv, probabilities, attended;
    std::vector<T> middle, normal_2, mean_2, rstd_2, hidden, tanh_u, activated;
  };

  void Reserve(const Batch& batch);
  void ReadWeights();
  double Forward(const Batch& batch);
  void ForwardBlock(int layer, std::vector<T>& out);
  void Backward(const Batch& batch, T loss_scale);
  void BackwardBlock(int layer);
  void BackwardNothing();

  const T* Weight(int parameter) const { return working_weights_[parameter].data(); }
  T* Gradient(int parameter);
  void Announce(int parameter);

  const GptConfig config_;
  const std::vector<int> backward_order_;
  DType weights_dtype_ = DType::kBFloat16;
  std::vector<PlaceInGroup> places_;
  std::vector<FlatSpace> flat_spaces_;
  std::vector<std::vector<T>> working_weights_;    // The weights as T.
  std::vector<std::vector<T>> working_gradients_;  // Only if T is not the type of gradients.

  int sequences_ = 0;  // In the batch in progress.
  int context_ = 0;
  int rows_ = 0;
  const std::function<void(int)>* gradient_ready_ = nullptr;
  std::vector<BlockActivations> blocks_;
  std::vector<T> final_in_, final_normal_, final_mean_, final_rstd_, logits_;
  std::vector<double> row_losses_;
  std::vector<T> d_stream_, d_width_, d_qkv_, d_hidden_, d_scores_;
};

// The training configuration: fp32 arithmetic.
std::unique_ptr<Model> MakeCpuGpt(const GptConfig& config);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CPU_CPU_GPT_H_
