/* A complete program with one rank, in C: fits a plane to points with AdamW on a Ballast service.
 *
 *   ballastd &
 *   ballast-c-example 127.0.0.1:7070
 */
#include <ballast/ballast.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { kPoints = 64, kInputs = 3, kSteps = 400 };

static void Check(int32_t status) {
  if (status == BALLAST_OK) return;
  fprintf(stderr, "ballast-c-example: %s\n", ballast_message());
  exit(1);
}

/* Points of a plane, which training has to find again. */
static void MakePoints(float x[kPoints][kInputs], float y[kPoints]) {
  static const float slope[kInputs] = {2.0f, -3.0f, 0.5f};
  for (int i = 0; i < kPoints; ++i) {
    y[i] = 1.0f;
    for (int k = 0; k < kInputs; ++k) {
      x[i][k] = (float)((i + 1) * (2 * k + 3) * 5 % 17 - 8) / 8.0f;
      y[i] += slope[k] * x[i][k];
    }
  }
}

int main(int argc, char** argv) {
  static float x[kPoints][kInputs], y[kPoints];
  MakePoints(x, y);

  /* What is trained, all in fp32: w of kInputs elements, and the scalar b. */
  float w[kInputs], b, w_gradient[kInputs], b_gradient;
  const int64_t w_shape[] = {kInputs};
  const ballast_parameter parameters[] = {
      {.size = sizeof(ballast_parameter), .name = "w", .shape = w_shape, .dimensions = 1},
      {.size = sizeof(ballast_parameter), .name = "b"}};
  ballast_hyper_parameters adam_w = BALLAST_ADAMW_DEFAULTS;
  adam_w.lr = 0.05;
  adam_w.weight_decay = 0;
  const ballast_group group = {.size = sizeof(group),
                               .name = "all",
                               .hyper_parameters = adam_w,
                               .wire_dtype = BALLAST_FLOAT32,
                               .return_dtype = BALLAST_FLOAT32};
  const ballast_job job = {.size = sizeof(job),
                           .name = "c-example",
                           .groups = &group,
                           .group_count = 1,
                           .parameters = parameters,
                           .parameter_count = 2,
                           .world_size = 1};
  void* const weights[] = {w, &b};
  const ballast_options options = {.size = sizeof(options),
                                   .service = argc > 1 ? argv[1] : "127.0.0.1:7070",
                                   .job = &job,
                                   .weights = weights};

  ballast_session* session;
  Check(ballast_open(&options, &session));
  ballast_info info = {.size = sizeof(info)};
  Check(ballast_get_info(session, &info));
  if (info.awaiting_weights) {
    const float w_first[kInputs] = {0}, b_first = 0;
    const float* const first[] = {w_first, &b_first};
    Check(ballast_upload_weights(session, first, 2));
  }
  Check(ballast_read_weights(session)); /* Now w and b have the weights of the job. */

  float loss = 0;
  ballast_decision decision = {.size = sizeof(decision)};
  for (int step = 0; step < kSteps; ++step) {
    loss = b_gradient = 0;
    for (int k = 0; k < kInputs; ++k) w_gradient[k] = 0;
    for (int i = 0; i < kPoints; ++i) {
      float error = b - y[i];
      for (int k = 0; k < kInputs; ++k) error += w[k] * x[i][k];
      loss += error * error / (2 * kPoints);
      b_gradient += error / kPoints;
      for (int k = 0; k < kInputs; ++k) w_gradient[k] += error * x[i][k] / kPoints;
    }
    const ballast_step settings = {.size = sizeof(settings)};
    Check(ballast_begin_step(session, &settings));
    const void* const gradients[] = {w_gradient, &b_gradient};
    Check(ballast_push_gradients(session, 0, gradients, 2, /*final=*/1));
    Check(ballast_seal_and_vote(session, 1, NULL, &decision)); /* Waits for all ranks. */
    if (!decision.applied) fprintf(stderr, "ballast-c-example: %s\n", ballast_message());
    Check(ballast_receive_weights(session)); /* Now w and b have the weights of the step. */
  }
  printf("step %llu: loss %.6f, w = %.3f %.3f %.3f, b = %.3f\n", (unsigned long long)decision.step,
         loss, w[0], w[1], w[2], b);
  ballast_close(session);
  return 0;
}
