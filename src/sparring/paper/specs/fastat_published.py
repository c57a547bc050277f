"""The numbers that the FastAT Benchmark published, as printed: 21 methods on CIFAR-10, 20 on Tiny ImageNet.

Source: FastAT Benchmark, arXiv 2604.22853, its benchmark_data.json. Means over three seeds, accuracies in per cent on
the whole test set. Seconds are for the whole training on one GPU, which they do not name.
"""

from __future__ import annotations

from sparring.paper.specs.item import PublishedMethod

CIFAR10 = (
    PublishedMethod("ELLE", 77.78, 50.74, 48.89, 47.19, 32.46, 25.27, 2942.99, 2.5),
    PublishedMethod("FGSM-AT", 69.17, 42.99, 42.59, 42.49, 37.28, 0.3, 1996.07, 1.39),
    PublishedMethod("FGSM-CUAP", 80.76, 56.3, 55.69, 55.58, 49.55, 0.22, 2706.19, 1.4),
    PublishedMethod("FGSM-FUAP", 80.64, 56.35, 55.85, 55.75, 49.73, 0.12, 2927.89, 1.4),
    PublishedMethod("FGSM-MEP-CS", 83.55, 51.11, 50.09, 49.8, 45.35, 0.81, 2141.5, 3.66),
    PublishedMethod("FGSM-PCO", 84.69, 55.04, 54.36, 54.18, 48.52, 0.32, 2997.04, 2.54),
    PublishedMethod("FGSM-PGI", 79.72, 56.43, 55.91, 55.82, 49.89, 0.08, 2646.65, 2.54),
    PublishedMethod("FGSM-RS", 77.66, 49.15, 48.38, 48.27, 43.09, 5.33, 1902.17, 1.39),
    PublishedMethod("FGSM-RS-CS", 80.54, 53.99, 53.37, 53.12, 48.64, 0.38, 1824.07, 1.95),
    PublishedMethod("FGSM-UAP", 80.61, 56.49, 55.9, 55.77, 49.44, 0.14, 2551.8, 1.4),
    PublishedMethod("Free-AT", 75.2, 49.32, 48.92, 48.83, 44.34, 0.17, 1978.59, 1.4),
    PublishedMethod("GAT", 85.1, 54.91, 53.98, 53.81, 49.15, 0.15, 2875.82, 1.9),
    PublishedMethod("GradAlign", 79.39, 53.57, 53.02, 52.87, 47.99, 0.62, 5612.39, 2.01),
    PublishedMethod("LIET", 80.68, 56.69, 56.12, 55.97, 49.99, 0.15, 2605.29, 1.4),
    PublishedMethod("N-AAER", 77.67, 52.84, 52.44, 52.37, 47.38, 0.18, 1863.55, 1.39),
    PublishedMethod("N-FGSM", 78.59, 53.64, 53.13, 53.07, 47.77, 0.41, 1940.75, 1.39),
    PublishedMethod("NU-AT", 80.98, 55.33, 54.78, 54.63, 50.1, 0.18, 2936.85, 1.9),
    PublishedMethod("PGD-AT", 85.35, 48.35, 46.74, 46.31, 44.33, 0.08, 6953.97, 1.3),
    PublishedMethod("PGD-AT-WA", 82.36, 55.05, 54.28, 54.17, 50.49, 0.15, 7026.8, 1.39),
    PublishedMethod("SSAT", 84.8, 52.4, 51.7, 51.46, 38.33, 1.55, 2120.88, 1.4),
    PublishedMethod("ZeroGrad", 75.85, 51.59, 51.12, 51.06, 45.94, 2.19, 1924.46, 1.39),
)

TINY_IMAGENET = (
    PublishedMethod("ELLE", 43.7, 25.15, 24.95, 24.91, 18.81, 0.21, 19270.18, 8.85),
    PublishedMethod("FGSM-AT", 39.99, 21.14, 20.92, 20.92, 14.87, 3.77, 8109.43, 4.56),
    PublishedMethod("FGSM-CUAP", 47.22, 26.34, 26.13, 26.13, 19.19, 0.09, 12098.58, 4.6),
    PublishedMethod("FGSM-FUAP", 48.45, 26.32, 26.1, 26.09, 19.1, 0.18, 13111.93, 4.6),
    PublishedMethod("FGSM-MEP-CS", 49.76, 26.47, 26.2, 26.17, 18.23, 0.19, 10622.89, 21.21),
    PublishedMethod("FGSM-PCO", 59.67, 19.61, 18.93, 18.72, 11.24, 0.21, 15338.78, 13.84),
    PublishedMethod("FGSM-PGI", 47.89, 26.57, 26.32, 26.29, 19.55, 0.11, 11200.37, 18.57),
    PublishedMethod("FGSM-RS", 43.91, 23.06, 22.87, 22.85, 16.33, 0.67, 8128.66, 4.56),
    PublishedMethod("FGSM-RS-CS", 43.63, 25.9, 25.71, 25.71, 18.74, 0.11, 10000.28, 6.64),
    PublishedMethod("FGSM-UAP", 49.39, 26.75, 26.46, 26.37, 18.9, 0.28, 10994.11, 4.58),
    PublishedMethod("Free-AT", 36.06, 19.96, 19.85, 19.81, 13.51, 0.12, 8293.47, 4.57),
    PublishedMethod("GAT", 57.33, 17.83, 17.06, 16.94, 11.33, 0.06, 14382.82, 6.57),
    PublishedMethod("GradAlign", 45.43, 24.54, 24.35, 24.32, 17.87, 0.19, 35944.0, 6.76),
    PublishedMethod("LIET", 44.8, 26.64, 26.54, 26.52, 19.88, 0.09, 11463.39, 4.61),
    PublishedMethod("N-FGSM", 47.5, 25.52, 25.28, 25.22, 18.79, 0.08, 8163.3, 4.56),
    PublishedMethod("NU-AT", 26.63, 15.15, 15.08, 15.08, 10.2, 0.44, 15308.53, 6.58),
    PublishedMethod("PGD-AT", 51.37, 23.36, 22.9, 22.78, 17.04, 0.08, 28575.32, 4.47),
    PublishedMethod("PGD-AT-WA", 48.07, 26.38, 26.19, 26.15, 19.77, 0.16, 28572.77, 4.56),
    PublishedMethod("SSAT", 59.82, 18.75, 17.82, 17.55, 11.94, 0.12, 9458.99, 4.58),
    PublishedMethod("ZeroGrad", 46.14, 25.02, 24.81, 24.73, 18.15, 1.11, 8218.72, 4.56),
)
